"""When tasks run by themselves: cron lines, triggers, their firing, and the files they come from."""
