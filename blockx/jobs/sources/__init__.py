"""Where the calls of a job come from: one file a source, found by ``registry``; jobs thread only."""
