//! Real applications in the mesh, unmodified and as their packages configure them; and a real peer, Envoy.
#![expect(clippy::unwrap_used, reason = "a test panics where it fails, its helpers too")]

mod world;

mod envoy;
mod iperf3;
mod nginx;
mod openssh;
mod postgres;
mod redis;
