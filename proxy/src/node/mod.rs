//! The pods of this node: network namespaces, enrolment, removal.

mod bars;
mod births;
mod capture_test;
mod change;
mod classify;
mod condition;
mod enrol;
mod listeners;
mod netns;
mod outcome;
mod pod;
mod pod_cgroup;
mod pod_status;
mod report;
mod self_test;
mod socket;
mod upkeep;

pub use bars::{Bar, barred};
pub use births::{BirthWatch, Births};
pub use capture_test::{CAPTURE_TEST, CaptureTestError, CaptureTests, capture_test_connect};
pub use classify::ClassifyError;
pub use condition::{Capture, PodStanding, Wanted, condition};
pub use enrol::{EnrolError, Enrolment, PodServer, RETRY};
pub use listeners::{PodListener, pod_listeners};
pub use netns::{Netns, NetnsError, own_netns_cookie};
pub use outcome::{Outcome, Outcomes};
pub use pod::{LocalPod, LocalPods};
pub use pod_status::{PodStatus, WriteError};
pub use report::{Complain, Report, Standings};
pub use self_test::{isolated_self_test, self_test, self_test_connect};
pub use socket::{PodListeners, dial, dial_as, listen_in, read_available};
pub use upkeep::wanted_identities;
