"""What a run shows and watches: alarms, the hacking monitor, progress, TensorBoard, and who waits for whom."""
