"""What people look at: the dashboard, the copies of figures for MLflow and TensorBoard, and Prometheus metrics."""
