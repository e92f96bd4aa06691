//! The embedded certificate authority.
