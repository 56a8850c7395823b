import os
import signal

import pytest

from fp8rl_jax.preemption import PreemptionGuard


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_sets_the_flag_and_handlers_are_restored(number):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with PreemptionGuard() as guard:
        assert not guard.should_stop()
        os.kill(os.getpid(), number)
        assert guard.should_stop()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_second_interrupt_does_not_wait():
    with pytest.raises(KeyboardInterrupt), PreemptionGuard() as guard:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert guard.should_stop()
        os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_restored_after_an_exception():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError), PreemptionGuard():
        raise RuntimeError
    assert signal.getsignal(signal.SIGTERM) is before
