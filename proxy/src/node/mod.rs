//! The pods of this node: network namespaces, enrolment, removal.

mod births;
mod classify;
mod enrol;
mod netns;
mod pod;
mod self_test;
mod socket;

pub use births::Births;
pub use classify::ClassifyError;
pub use enrol::{EnrolError, Enrolment, PodServer, RETRY};
pub use netns::{Netns, NetnsError, own_netns_cookie};
pub use pod::{LocalPod, LocalPods};
pub use self_test::{self_test, self_test_connect};
pub use socket::{PodListeners, dial, dial_as, listen_in, read_available};
