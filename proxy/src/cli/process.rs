//! What the process asks of the kernel for itself before it does anything else.

use nix::errno::Errno;
use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::memory;
use crate::dataplane::PodLimit;

/// What came of [`prepare_process`]; told in the log, once there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hardening {
    /// The number of open files that this process may have from now on.
    pub open_files: Result<u64, Errno>,
    /// Whether other processes of the same user are kept from reading this one's memory, and its keys.
    pub undumpable: Result<(), Errno>,
}

/// Raises the soft limit of open files to the hard limit, keeps keys out of core dumps and from debuggers, and sets the
/// allocator to its work. To be called before there are threads.
pub fn prepare_process() -> Hardening {
    memory::keep_freed_memory();
    Hardening {
        open_files: raise_open_files(),
        undumpable: prctl::set_dumpable(false),
    }
}

fn raise_open_files() -> Result<u64, Errno> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    }
    Ok(hard)
}

/// How many connections may be carried for one pod at once. Where nothing is said, pods share as many as the files that
/// this process may open suffice for, at two a connection.
pub(super) fn connections_per_pod(said: Option<u32>) -> PodLimit {
    said.map_or_else(
        || {
            let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft);
            PodLimit::Of(u32::try_from(files / 2).unwrap_or(u32::MAX))
        },
        PodLimit::Fixed,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_of_open_files_becomes_the_hard_one() {
        let hard = raise_open_files().unwrap();
        assert_eq!(getrlimit(Resource::RLIMIT_NOFILE).unwrap(), (hard, hard));
    }
}
