//! The process as the kernel sees it.

use std::fs;

use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage};
use nix::sys::time::TimeValLike;

/// Figures of this process; each is none where the kernel does not tell.
#[derive(Debug, Default)]
pub(super) struct ProcessFigures {
    pub(super) resident_bytes: Option<u64>,
    pub(super) threads: Option<u64>,
    pub(super) open_fds: Option<u64>,
    pub(super) max_fds: Option<u64>,
    pub(super) cpu_seconds: Option<f64>,
}

impl ProcessFigures {
    pub(super) fn read() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let field = |name: &str| {
            let line = status
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        };
        let usage = getrusage(UsageWho::RUSAGE_SELF).ok();
        Self {
            resident_bytes: field("VmRSS").map(|kib| kib * 1024),
            threads: field("Threads"),
            // Without the one that reads the folder.
            open_fds: fs::read_dir("/proc/self/fd")
                .ok()
                .map(|fds| (fds.count() as u64).saturating_sub(1)),
            max_fds: getrlimit(Resource::RLIMIT_NOFILE).ok().map(|(soft, _)| soft),
            cpu_seconds: usage
                .map(|usage| (usage.user_time() + usage.system_time()).num_microseconds() as f64 / 1_000_000.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_tells_every_figure() {
        let figures = ProcessFigures::read();
        assert!(figures.resident_bytes.unwrap() > 100_000, "{figures:?}");
        assert!(figures.open_fds.unwrap() >= 3, "{figures:?}");
        assert!(figures.max_fds.unwrap() >= figures.open_fds.unwrap(), "{figures:?}");
        assert!(figures.threads.unwrap() >= 1, "{figures:?}");
        assert!(figures.cpu_seconds.is_some());
    }
}
