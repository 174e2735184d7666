"""Optimizers and schedules, built by `factory.make_optimizer` and `scheduler.make_scheduler`."""
