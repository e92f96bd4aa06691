//! What Adit does, one module per behaviour, on a bed of real namespaces with the real programs.
#![expect(clippy::unwrap_used, reason = "a test panics where it fails, its helpers too")]

mod bed;
mod world;

mod abrupt_clients;
mod bulk;
mod by_cgroup;
mod bypass;
mod ca_trouble;
mod concurrency;
mod connect_variants;
mod crash;
mod departure;
mod direct;
mod drain;
mod hairpin;
mod half_close;
mod host;
mod identity;
mod impersonation;
mod label;
mod limits;
mod many_pods;
mod outside_mesh;
mod own_ports;
mod paths;
mod policy;
mod policy_change;
mod probes;
mod refusal;
mod reload;
mod reset;
mod secrecy;
mod server_first;
mod services;
mod services_direct;
mod small_writes;
mod source_address;
mod source_ports;
mod stalled_stream;
mod startup;
mod tampering;
mod telemetry;
mod transparency;
mod upgrade;
