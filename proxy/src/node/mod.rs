//! The pods of this node: network namespaces, enrolment, removal.

mod enrol;
mod netns;
mod pod;
mod self_test;
mod socket;
mod upkeep;

pub use enrol::{EnrolError, Enrolment, PodServer, RETRY};
pub use netns::{Netns, NetnsError};
pub use pod::{LocalPod, LocalPods};
pub use self_test::{isolated_self_test, self_test, self_test_connect};
pub use socket::{PodListeners, dial, dial_as, listen_in, read_available};
pub use upkeep::wanted_identities;
