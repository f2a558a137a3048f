"""Documents on disk: text files, JSON lines, token indices; the stream and the step planner over them."""
