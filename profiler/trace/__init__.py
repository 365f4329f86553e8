"""The trace on disk: meta files, the writer and the reader."""
