"""NVIDIA's management library (NVML): lists GPUs, samples their load and health."""
