//! The cluster that all tests share, and what is kept of it when one fails.

use std::path::PathBuf;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

use adit_tests::cluster::{Cluster, owned_prefix};

/// Its prefix: that of the task that runs the tests, who makes sure that nothing of it stays, or one of our own.
static SHARED: LazyLock<Cluster> = LazyLock::new(|| {
    Cluster::sweep().unwrap();
    let prefix = std::env::var("ADIT_CLUSTER").unwrap_or_else(|_| owned_prefix('t'));
    Cluster::up(prefix).unwrap()
});

/// The cluster that all tests share.
pub(crate) fn shared() -> &'static Cluster {
    &SHARED
}

/// A test's use of the cluster, in a namespace that is its own.
pub(crate) struct World {
    pub(crate) cluster: &'static Cluster,
    pub(crate) namespace: String,
}

impl World {
    /// A namespace whose name begins with `name`.
    pub(crate) fn new(name: &str) -> World {
        static COUNT: AtomicU32 = AtomicU32::new(1);
        let namespace = format!("{name}-{}", COUNT.fetch_add(1, Ordering::Relaxed));
        SHARED.namespace(&namespace, &[]).unwrap();
        World {
            cluster: &SHARED,
            namespace,
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let folder = std::env::var_os("ADIT_LOGS").map_or_else(std::env::temp_dir, PathBuf::from);
            let folder = folder.join(format!("cluster-{}", self.namespace));
            match self.cluster.collect_logs(&folder) {
                Ok(()) => eprintln!("the cluster's logs are in {}", folder.display()),
                Err(error) => eprintln!("the cluster's logs are lost: {error:#}"),
            }
        }
        let gone = self
            .cluster
            .kubectl(["delete", "namespace", "--wait=false", &self.namespace]);
        if let Err(error) = gone {
            eprintln!("{error:#}");
        }
    }
}
