"""The native engine: tensors, automatic differentiation and modules on OpenCL devices."""
