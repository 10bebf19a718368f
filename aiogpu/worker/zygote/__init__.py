"""The zygote: a process that imports modules once and is forked for each worker."""
