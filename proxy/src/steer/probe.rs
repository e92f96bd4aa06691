//! Whether this kernel has what the programs need, and by which name what is missing goes.

use aya::maps::MapType;
use aya::programs::ProgramType;
use aya::sys::{BpfHelper, is_helper_supported, is_map_supported, is_program_supported};

use super::SteerError;

const PROGRAMS: [(ProgramType, &str); 3] = [
    (
        ProgramType::CgroupSockAddr,
        "cgroup connect and getpeername programs (BPF_PROG_TYPE_CGROUP_SOCK_ADDR)",
    ),
    (ProgramType::SockOps, "sock_ops programs (BPF_PROG_TYPE_SOCK_OPS)"),
    (
        ProgramType::SkLookup,
        "sk_lookup programs (BPF_PROG_TYPE_SK_LOOKUP, Linux 5.9)",
    ),
];

const MAPS: [(MapType, &str); 4] = [
    (MapType::Hash, "hash maps"),
    (MapType::SockMap, "socket maps (BPF_MAP_TYPE_SOCKMAP)"),
    (
        MapType::SkStorage,
        "socket storage (BPF_MAP_TYPE_SK_STORAGE, Linux 5.2)",
    ),
    (MapType::RingBuf, "ring buffers (BPF_MAP_TYPE_RINGBUF, Linux 5.8)"),
];

const HELPERS: [(ProgramType, BpfHelper, &str); 9] = [
    (
        ProgramType::CgroupSockAddr,
        BpfHelper::BPF_FUNC_get_netns_cookie,
        "bpf_get_netns_cookie at connect (Linux 5.7)",
    ),
    (
        ProgramType::CgroupSockAddr,
        BpfHelper::BPF_FUNC_get_current_cgroup_id,
        "bpf_get_current_cgroup_id at connect",
    ),
    (
        ProgramType::CgroupSockAddr,
        BpfHelper::BPF_FUNC_get_current_pid_tgid,
        "bpf_get_current_pid_tgid at connect",
    ),
    (
        ProgramType::CgroupSockAddr,
        BpfHelper::BPF_FUNC_get_current_comm,
        "bpf_get_current_comm at connect",
    ),
    (
        ProgramType::CgroupSockAddr,
        BpfHelper::BPF_FUNC_skc_lookup_tcp,
        "bpf_skc_lookup_tcp at connect",
    ),
    (
        ProgramType::CgroupSockAddr,
        BpfHelper::BPF_FUNC_sk_storage_get,
        "bpf_sk_storage_get at connect",
    ),
    (
        ProgramType::SockOps,
        BpfHelper::BPF_FUNC_get_netns_cookie,
        "bpf_get_netns_cookie in sock_ops (Linux 5.15)",
    ),
    (
        ProgramType::SockOps,
        BpfHelper::BPF_FUNC_sk_storage_get,
        "bpf_sk_storage_get in sock_ops",
    ),
    (
        ProgramType::SkLookup,
        BpfHelper::BPF_FUNC_sk_assign,
        "bpf_sk_assign in sk_lookup (Linux 5.9)",
    ),
];

/// Asks the kernel for each feature; the first one missing is the error. Asked only after the kernel has refused
/// something: it takes a while.
pub(super) fn probe() -> Result<(), SteerError> {
    for (program, name) in PROGRAMS {
        require(name, is_program_supported(program))?;
    }
    for (map, name) in MAPS {
        require(name, is_map_supported(map))?;
    }
    for (program, helper, name) in HELPERS {
        require(name, is_helper_supported(program, helper))?;
    }
    Ok(())
}

/// All features of [`probe`] that this kernel lacks, by their names.
///
/// # Errors
///
/// The kernel could not be asked: a capability is missing.
pub fn missing_features() -> Result<Vec<&'static str>, SteerError> {
    let programs = PROGRAMS.map(|(program, name)| (name, require(name, is_program_supported(program))));
    let maps = MAPS.map(|(map, name)| (name, require(name, is_map_supported(map))));
    let helpers = HELPERS.map(|(program, helper, name)| (name, require(name, is_helper_supported(program, helper))));
    let mut missing = Vec::new();
    for (name, asked) in programs.into_iter().chain(maps).chain(helpers) {
        match asked {
            Ok(()) => {}
            Err(SteerError::Unsupported(_)) => missing.push(name),
            Err(error) => return Err(error),
        }
    }
    Ok(missing)
}

fn require<E: std::fmt::Display>(name: &str, supported: Result<bool, E>) -> Result<(), SteerError> {
    match supported {
        Ok(true) => Ok(()),
        Ok(false) => Err(SteerError::Unsupported(name.to_owned())),
        Err(error) => Err(SteerError::Probe {
            what: name.to_owned(),
            error: error.to_string(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_feature_is_refused_by_its_name() {
        let error = require("time travel", Ok::<_, String>(false)).unwrap_err();
        assert!(error.to_string().contains("lacks time travel"), "{error}");
        let error = require("time travel", Err("EPERM")).unwrap_err();
        assert!(error.to_string().contains("CAP_BPF"), "{error}");
    }
}
