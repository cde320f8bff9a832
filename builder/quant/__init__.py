"""From stored tensors to one QuantTensor per module; nothing downstream sees a checkpoint's dialect."""
