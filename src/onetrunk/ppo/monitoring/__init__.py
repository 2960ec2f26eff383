"""What a run shows and watches: alarms, progress, TensorBoard, and who waits for whom."""
