//! Bytes between two streams, with half-close and reset carried over.
