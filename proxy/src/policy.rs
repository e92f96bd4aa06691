//! Whether a connection is permitted, and by which rule.
