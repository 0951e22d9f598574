"""From a job file to rows: sources, one job's run, list order, sinks. Main process, jobs thread."""
