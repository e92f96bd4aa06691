//! The pods of this node: network namespaces, enrolment, removal.

mod births;
mod classify;
mod enrol;
mod netns;
mod pod;
mod self_test;
mod socket;
mod upkeep;

pub use births::{BirthWatch, Births};
pub use classify::ClassifyError;
pub use enrol::{EnrolError, Enrolment, PodServer, RETRY};
pub use netns::{Netns, NetnsError, own_netns_cookie};
pub use pod::{LocalPod, LocalPods};
pub use self_test::{isolated_self_test, self_test, self_test_connect};
pub use socket::{PodListeners, dial, dial_as, listen_in, read_available};
pub use upkeep::wanted_identities;
