"""The device mesh, the logical-axis rules and multi-process start-up."""
