//! Outbound and inbound: decide, connect, relay.

pub mod record;
