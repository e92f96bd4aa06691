//! The pods of this node: network namespaces, enrolment, removal.

mod netns;
mod socket;

pub use netns::{Netns, NetnsError};
pub use socket::{PodListeners, bind_client, configure, dial, listen_in};
