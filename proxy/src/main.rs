//! The adit binary.
fn main() {}
