//! Arguments, environment and configuration file to a running process.
