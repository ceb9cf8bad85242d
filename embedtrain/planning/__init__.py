"""What a training takes of memory, network and time, and the layout that follows, before anything is launched."""
