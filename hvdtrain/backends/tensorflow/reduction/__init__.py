"""How TensorFlow's gradients and parameters become one."""
