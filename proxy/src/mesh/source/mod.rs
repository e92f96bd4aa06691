//! Sources of truth: each builds a [`Mesh`](super::Mesh) from what it reads and publishes it.
