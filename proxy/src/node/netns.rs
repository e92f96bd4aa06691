//! Network namespaces: a pod's, told by its cookie.

use std::fs::{self, File};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use nix::sched::{CloneFlags, setns};
use socket2::{Domain, Socket, Type};
use thiserror::Error;

/// Why a network namespace cannot be used.
#[derive(Debug, Error)]
pub enum NetnsError {
    /// It cannot be opened.
    #[error("opening network namespace {path}: {error}")]
    Open {
        /// Where it should be.
        path: PathBuf,
        /// What the kernel says.
        error: io::Error,
    },
    /// It cannot be entered.
    #[error("entering network namespace {path}: {error}; Adit needs CAP_SYS_ADMIN")]
    Enter {
        /// Where it is.
        path: PathBuf,
        /// What the kernel says.
        error: io::Error,
    },
    /// It is the host's own, which is never enrolled.
    #[error("{path} is the network namespace of the proxy itself: pods of the host's network are never enrolled")]
    Host {
        /// Where it is.
        path: PathBuf,
    },
    /// Something in it could not be done.
    #[error("in network namespace {path}: {doing}: {error}")]
    Inside {
        /// Where it is.
        path: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// What the kernel says.
        error: io::Error,
    },
}

/// A pod's network namespace, and the way back from it.
#[derive(Debug)]
pub struct Netns {
    path: PathBuf,
    file: File,
    /// Unique among the namespaces that there are.
    inode: u64,
    /// The proxy's own.
    home: File,
    cookie: u64,
}

impl Netns {
    /// Opens the namespace at `path` and learns its cookie. Refuses the proxy's own.
    pub fn open(path: &Path) -> Result<Self, NetnsError> {
        let open = |path: &Path| {
            File::open(path).map_err(|error| NetnsError::Open {
                path: path.to_owned(),
                error,
            })
        };
        let own = Path::new("/proc/thread-self/ns/net");
        let file = open(path)?;
        let inode = file.metadata().map_err(|error| NetnsError::Open {
            path: path.to_owned(),
            error,
        })?;
        let mut netns = Self {
            path: path.to_owned(),
            file,
            inode: inode.ino(),
            home: open(own)?,
            cookie: 0,
        };
        let home_cookie = cookie().map_err(|error| netns.inside("reading the host's cookie", error))?;
        netns.cookie = netns
            .run(cookie)?
            .map_err(|error| netns.inside("reading its cookie (SO_NETNS_COOKIE, Linux 5.14)", error))?;
        if netns.cookie == home_cookie {
            return Err(NetnsError::Host { path: path.to_owned() });
        }
        Ok(netns)
    }

    /// The calling thread's own namespace, where it lives: a visit leads back to it.
    pub(super) fn current() -> Result<Self, NetnsError> {
        let path = PathBuf::from("/proc/thread-self/ns/net");
        let open = |error| NetnsError::Open {
            path: path.clone(),
            error,
        };
        let file = File::open(&path).map_err(open)?;
        let cookie = cookie().map_err(open)?;
        let home = file.try_clone().map_err(open)?;
        let inode = file.metadata().map_err(open)?.ino();
        Ok(Self {
            path,
            file,
            inode,
            home,
            cookie,
        })
    }

    /// The kernel's unique number of the namespace.
    pub fn cookie(&self) -> u64 {
        self.cookie
    }

    /// The number by which it is told from the others that there are at the same time.
    pub(super) fn inode(&self) -> u64 {
        self.inode
    }

    /// Whether there is another namespace by now where it was opened: the pod has got a new one.
    pub(super) fn was_replaced(&self) -> bool {
        fs::metadata(&self.path).is_ok_and(|metadata| metadata.ino() != self.inode)
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `work` on this thread inside the namespace. It must not block for long, and not hand the thread on.
    ///
    /// # Panics
    ///
    /// Ends the process if there is no way back: a thread that stayed in a pod's namespace would act as the pod.
    pub fn run<T>(&self, work: impl FnOnce() -> T) -> Result<T, NetnsError> {
        /// Returns even when `work` panics.
        struct Home<'a>(&'a File);
        impl Drop for Home<'_> {
            fn drop(&mut self) {
                if let Err(error) = setns(self.0, CloneFlags::CLONE_NEWNET) {
                    tracing::error!("returning from a pod's network namespace: {error}; ending the process");
                    std::process::abort();
                }
            }
        }
        setns(&self.file, CloneFlags::CLONE_NEWNET).map_err(|error| NetnsError::Enter {
            path: self.path.clone(),
            error: error.into(),
        })?;
        let _home = Home(&self.home);
        Ok(work())
    }

    /// The addresses that interfaces have in it by which others can reach it, in the kernel's order.
    pub(super) fn addresses(&self) -> Result<Vec<IpAddr>, NetnsError> {
        let all = self
            .run(getifaddrs)?
            .map_err(|error| self.inside("reading its addresses", error.into()))?;
        let mut addresses = Vec::new();
        for interface in all.filter(|interface| !interface.flags.contains(InterfaceFlags::IFF_LOOPBACK)) {
            let Some(address) = interface.address else { continue };
            let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
            let v6 = address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip()));
            if let Some(ip) = v4.or(v6).filter(is_global)
                && !addresses.contains(&ip)
            {
                addresses.push(ip);
            }
        }
        Ok(addresses)
    }

    /// The namespace's `net.ipv4.ip_local_port_range`, which counts for IPv6 too.
    pub fn local_port_range(&self) -> Result<[u16; 2], NetnsError> {
        let text = self
            // The file is that of the namespace of the thread that opens it.
            .run(|| fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range"))?
            .map_err(|error| self.inside("reading ip_local_port_range", error))?;
        parse_port_range(&text)
            .ok_or_else(|| self.inside("reading ip_local_port_range", io::Error::other(format!("is {text:?}"))))
    }

    /// An error of something tried inside.
    pub(super) fn inside(&self, doing: &'static str, error: io::Error) -> NetnsError {
        NetnsError::Inside {
            path: self.path.clone(),
            doing,
            error,
        }
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The cookie of the node's own network namespace, in which this process is.
pub fn own_netns_cookie() -> Result<u64, NetnsError> {
    Netns::current().map(|netns| netns.cookie())
}

/// The cookie of the calling thread's network namespace.
fn cookie() -> io::Result<u64> {
    let socket = Socket::new(Domain::UNIX, Type::DGRAM, None)?;
    netns_cookie(&socket)
}

#[expect(unsafe_code, reason = "a socket option without a safe wrapper")]
fn netns_cookie(socket: &Socket) -> io::Result<u64> {
    const SO_NETNS_COOKIE: libc::c_int = 71;
    let mut cookie = 0_u64;
    let mut len = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the pointers are to values that live through the call, of the length told.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            std::ptr::from_mut(&mut cookie).cast(),
            &raw mut len,
        )
    };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(cookie)
    }
}

/// Whether others than the neighbours on the link may reach somebody at the address.
fn is_global(ip: &IpAddr) -> bool {
    let local = match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    !(local || ip.is_loopback() || ip.is_unspecified() || ip.is_multicast())
}

fn parse_port_range(text: &str) -> Option<[u16; 2]> {
    let mut words = text.split_ascii_whitespace().map(str::parse);
    match (words.next(), words.next(), words.next()) {
        (Some(Ok(low)), Some(Ok(high)), None) if low <= high => Some([low, high]),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_range_is_two_ordered_numbers() {
        assert_eq!(parse_port_range("32768\t60999\n"), Some([32768, 60999]));
        for text in ["", "1", "5 3", "a b", "1 2 3", "1 70000"] {
            assert_eq!(parse_port_range(text), None, "{text:?}");
        }
    }

    #[test]
    fn only_addresses_that_others_can_reach_count() {
        for (text, counts) in [
            ("10.244.1.2", true),
            ("fd00::1", true),
            ("2001:db8::1", true),
            ("127.0.0.1", false),
            ("::1", false),
            ("169.254.7.8", false),
            ("fe80::1", false),
            ("0.0.0.0", false),
        ] {
            assert_eq!(is_global(&text.parse().unwrap()), counts, "{text}");
        }
    }

    #[test]
    fn the_hosts_own_namespace_is_refused() {
        assert!(matches!(
            Netns::open(Path::new("/proc/self/ns/net")),
            Err(NetnsError::Host { .. })
        ));
    }
}
