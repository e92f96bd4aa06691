//! The programs' own words on what they decide, for those who ask.

use std::str::FromStr;

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
    /// For the pod of this `namespace/name`.
    Pod(String),
}

impl LogScope {
    /// Whether this pod's decisions are logged.
    pub fn covers(&self, namespace: &str, name: &str) -> bool {
        match self {
            Self::None => false,
            Self::All => true,
            Self::Pod(pod) => pod.split_once('/') == Some((namespace, name)),
        }
    }
}

impl FromStr for LogScope {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "all" => Ok(Self::All),
            pod if pod.split('/').count() == 2 => Ok(Self::Pod(pod.to_owned())),
            _ => Err("none, all, or a pod as namespace/name".to_owned()),
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
    pub(super) fn take(ebpf: &mut aya::Ebpf) -> Option<Self> {
        EbpfLogger::init_with_logger(ebpf, ToTracing).ok().map(Self)
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
    fn a_scope_names_none_all_or_one_pod() {
        for (text, covers) in [
            ("none", false),
            ("all", true),
            ("shop/cart", true),
            ("shop/other", false),
        ] {
            assert_eq!(
                text.parse::<LogScope>().unwrap().covers("shop", "cart"),
                covers,
                "{text}"
            );
        }
        assert!("cart".parse::<LogScope>().is_err());
        assert!("a/b/c".parse::<LogScope>().is_err());
    }
}
