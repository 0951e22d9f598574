"""Where rows go: one file a sink, found by ``registry``; jobs thread only."""
