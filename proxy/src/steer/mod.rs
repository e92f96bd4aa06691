//! The user-space half of the kernel programs: load, attach, verify, maps.
