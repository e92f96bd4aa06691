//! What tests do inside pods: servers and clients that report exactly what the kernel showed them.
