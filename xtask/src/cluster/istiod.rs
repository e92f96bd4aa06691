//! Istio's control plane, an authority of tests on a cluster, at the version that `tests/istiod/` pins.

use crate::go::{Build, Module, Programs};

/// One program, as Istio calls it.
pub(super) const ISTIOD: Programs = Programs {
    what: "istiod",
    variable: "ADIT_ISTIOD_BIN",
    cache: "istiod",
    version_of: "istio.io/istio",
    modules: &[Module {
        folder: "tests/istiod",
        files: &[],
        cgo: false,
        builds: &[Build {
            name: "pilot-discovery",
            package: "istio.io/istio/pilot/cmd/pilot-discovery",
            link: "-s -w",
            programs: &[],
        }],
    }],
};
