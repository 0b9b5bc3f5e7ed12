"""GPT and ResNet-18 beside PyTorch's DistributedDataParallel: speed, and the course of training."""
