"""What readers of several families share: names, patterns, checks of tensors, packed int32."""
