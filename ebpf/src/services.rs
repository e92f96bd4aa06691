//! The choice of an endpoint for a connection to a service.

use adit_common::{Addr, Choice, Endpoint, HostPort, ServiceKey, choose};
use aya_ebpf::helpers::bpf_get_prandom_u32;

use crate::context::read_addr;
use crate::maps::{ENDPOINTS, SERVICES};

/// Where a connection to a service goes.
pub enum Chosen {
    /// The proxy chooses.
    Ask,
    /// Nowhere.
    Nowhere,
    /// There.
    Endpoint(Endpoint),
}

/// Chooses an endpoint of the service at a virtual address.
#[inline(always)]
pub fn endpoint(addr: &Addr, port: HostPort) -> Chosen {
    let service = ServiceKey::new(*addr, port);
    // SAFETY: a helper without arguments.
    let random = unsafe { bpf_get_prandom_u32() };
    // SAFETY: whichever two lists a torn read may mix, the key below leads to an endpoint of this service or to none.
    let list = unsafe { SERVICES.get(service) };
    match choose(&service, list, random) {
        Choice::Ask => Chosen::Ask,
        Choice::Nowhere => Chosen::Nowhere,
        Choice::Place(place) => match ENDPOINTS.get_ptr(place) {
            // SAFETY: an endpoint never changes while it is there, and stays long after its list was last named. Read
            // once, so that what is decided on is what is connected to.
            Some(endpoint) => unsafe {
                let addr = read_addr(&raw const (*endpoint).addr.words);
                Chosen::Endpoint(Endpoint::new(addr, (*endpoint).port))
            },
            // The list has gone since it was read.
            None => Chosen::Ask,
        },
    }
}
