//! The programs' own words on what they decide, for those who ask.

use aya_log::EbpfLogger;
use tokio::io::unix::AsyncFd;

/// For which pods the programs log.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum LogScope {
    /// For none; the programs then hold no logging on the hot path of any pod.
    #[default]
    None,
    /// For all.
    All,
    /// For one pod.
    Pod {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
}

impl LogScope {
    /// Whether this pod's decisions are logged.
    pub fn covers(&self, namespace: &str, name: &str) -> bool {
        match self {
            Self::None => false,
            Self::All => true,
            Self::Pod {
                namespace: its,
                name: own,
            } => its == namespace && own == name,
        }
    }
}

/// Writes what the programs log to this process's log, until the task is dropped.
pub async fn forward_logs(log: ProgramLog) {
    #[expect(
        deprecated,
        reason = "the ring owns its descriptor, so it stays open as long as the registration"
    )]
    let registered = AsyncFd::new(log.0);
    let mut log = match registered {
        Ok(log) => log,
        Err(error) => {
            tracing::warn!("reading the kernel programs' log: {error}; their decisions are not logged");
            return;
        }
    };
    while let Ok(mut ready) = log.readable_mut().await {
        ready.get_inner_mut().flush();
        ready.clear_ready();
    }
}

/// The ring that the programs log to.
pub struct ProgramLog(EbpfLogger<ToTracing>);

impl ProgramLog {
    /// The ring of the program with this id.
    pub(super) fn of(program: u32) -> Option<Self> {
        match EbpfLogger::init_from_id_with_logger(program, ToTracing) {
            Ok(logger) => Some(Self(logger)),
            Err(error) => {
                tracing::warn!("opening the kernel programs' log: {error}; their decisions are not logged");
                None
            }
        }
    }
}

/// Passes records on to `tracing`.
struct ToTracing;

impl log::Log for ToTracing {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        tracing::info!(target: "bpf", "{}", record.args());
    }

    fn flush(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_covers_none_all_or_one_pod() {
        let pod = |name: &str| LogScope::Pod {
            namespace: "shop".to_owned(),
            name: name.to_owned(),
        };
        for (scope, covers) in [
            (LogScope::None, false),
            (LogScope::All, true),
            (pod("cart"), true),
            (pod("x"), false),
        ] {
            assert_eq!(scope.covers("shop", "cart"), covers, "{scope:?}");
        }
    }
}
