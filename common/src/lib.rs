//! What Adit's kernel programs and its proxy share: map keys and values, and the decisions that the programs take.
//!
//! The decisions are pure functions over plain values, so that unit tests run them in user space exactly as the
//! kernel does. Nothing here allocates or panics.

#![no_std]

mod addr;
mod decide;
mod direct;
mod exclusions;
mod maps;
mod services;
mod startup;

pub use addr::{Addr, HostPort};
pub use decide::{
    ConnectFacts, ConnectVerdict, HBONE_PORT, MAX_CANDIDATES, Refusal, RewrittenPorts, SynFacts, SynVerdict, connect,
    destination_hash, syn,
};
pub use direct::{
    ANY_PORT, COUNTERS, Cached, Counter, Destination, Direct, DirectEnd, DirectKind, EVENTS_LEN, MAX_DESTINATIONS,
    MAX_DIRECT, MAX_RANGES, MAX_VERDICTS, NO_VERDICT, NOBODY, REFUSALS_LEN, REFUSALS_PERIOD, REFUSALS_TOLD, Range,
    RefusalKind, RefusalShare, Verdict, VerdictKey, cached, refusal_index,
};
pub use exclusions::{
    EXCLUDED, Excludable, Exclusion, ExclusionKind, KEPT, MAX_EXCLUSIONS, NOT_EXCLUDED, excludes_inbound,
    excludes_outbound,
};
pub use maps::{
    AddrKey, COMMAND_LEN, Config, Flow, FlowKey, FlowKind, LAYOUT, LISTENERS_PER_POD, Listener, MAX_CLIENTS, MAX_FLOWS,
    MAX_PODS, MAX_PROXIES, Pod, PodFlags, listener_index,
};
pub use services::{
    Choice, Endpoint, EndpointKey, EndpointList, MAX_ENDPOINTS, MAX_ENDPOINTS_OF_PORT, MAX_SERVICES, ServiceKey,
    choose, through,
};
pub use startup::{MAX_OTHERS, STRANGERS_LEN, Startup, StartupVerdict, Stranger, not_enrolled};
