"""A task whose grader does what the completion says; imported by grading workers."""

import os
import subprocess
import sys
import time

from fp8rl_jax.tasks.base import Example, Grade

EXAMPLE = Example("0", "prompt", "answer")


class MisbehavingTask:
    name = "misbehaving"

    @staticmethod
    def grade(example, completion, token_ids):
        match completion:
            case "raise":
                raise RuntimeError("x" * 1_000_000)
            case "sys.exit":
                sys.exit(3)
            case "os._exit":
                os._exit(3)
            case "hang":
                while True:
                    pass
            case "hang in a child":
                subprocess.run(["sleep", "1000"], check=True)
            case "print":
                print("x" * 10_000_000)
                return Grade(1.0, True)
            case "many components":
                return Grade(1.0, True, {str(i): 0.0 for i in range(1_000_000)})
            case "allocate":
                return Grade(float(len(bytearray(10**10))), True)
            case "recurse":
                return MisbehavingTask.grade(example, completion, token_ids)
            case "nan":
                return Grade(float("nan"), True)
            case "tuple":
                return (1.0, True)
            case "say failure":
                return Grade(1.0, True, failure="no verdict")
            case "modules":
                heavy = {"jax", "numpy", "grain", "transformers"} & set(sys.modules)
                return Grade(1.0, True, {m: 1.0 for m in heavy})
            case "slow":
                time.sleep(0.5)
        return Grade(float(completion), True, {"ids": float(sum(token_ids))})


class UnloadableTask:
    name = "unloadable"

    class _Grader:
        def __reduce__(self):
            return int, ("not a number",)

        def __call__(self, *args):
            raise NotImplementedError

    grade = _Grader()
