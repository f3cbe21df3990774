"""Pipeline parallelism: partition, schedules, their proof and simulation (pure Python), and the runtime (torch)."""
