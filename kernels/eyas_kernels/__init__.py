"""Tensor operations that target and draft share. Rows go in, rows come out, and the result of a row does not
depend on which other rows share the call: that is what makes speculation lossless to the bit."""
