//! What the developer tasks share with the tests.

pub mod archive;
