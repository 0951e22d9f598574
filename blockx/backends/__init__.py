"""The reads and writes behind a waiting call: tables and nodes. Main process, io thread only."""
