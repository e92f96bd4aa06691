//! The proxy's sockets in pods' network namespaces.
//!
//! A socket belongs to the namespace in which it was made, for good: only making it needs a visit there.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::time::Duration;

use bytes::BytesMut;
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::{Netns, NetnsError};
use crate::steer::Clients;

/// Pending connections that a listener holds; the kernel lowers it to `net.core.somaxconn`.
const BACKLOG: i32 = 4096;
/// How often another source address and port are tried when one is taken.
const BIND_ATTEMPTS: u32 = 8;

/// Silence after which a peer is asked whether it is still there; with the interval and count below, one that is not
/// is found out within two minutes.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
const KEEPALIVE_COUNT: u32 = 4;

/// One worker's listeners in a pod.
#[derive(Debug)]
pub struct PodListeners {
    /// For the pod's own captured connections.
    pub outbound: TcpListener,
    /// For tunnels.
    pub hbone: TcpListener,
    /// For plaintext from outside the mesh.
    pub plaintext: TcpListener,
}

/// Makes listeners in the namespace, for each worker a set; the kernel spreads connections over the workers.
///
/// They are bound to a loopback address at ports that the kernel chooses: the socket lookup finds them by themselves,
/// so the ports matter to nobody.
pub fn listen_in(netns: &Netns, workers: usize) -> Result<Vec<PodListeners>, NetnsError> {
    netns
        .run(|| {
            let kinds = (group(workers)?, group(workers)?, group(workers)?);
            let sets = kinds.0.into_iter().zip(kinds.1).zip(kinds.2);
            Ok(sets
                .map(|((outbound, hbone), plaintext)| PodListeners {
                    outbound,
                    hbone,
                    plaintext,
                })
                .collect())
        })?
        .map_err(|error| netns.inside("making listeners", error))
}

/// `count` listeners at one port, and no more to come.
fn group(count: usize) -> io::Result<Vec<TcpListener>> {
    let first = listener(None)?;
    let at = first.local_addr()?;
    let mut listeners = vec![first];
    for _ in 1..count {
        listeners.push(listener(Some(at))?);
    }
    close_group(&listeners, at.port())?;
    Ok(listeners)
}

/// Keeps processes of the pod with the proxy's user id out of the group: the kernel would spread connections over them
/// too, past all that the proxy decides.
///
/// A bind to the group's port fails as soon as one member no longer shares it. That must not be the first, which the
/// socket lookup is given: from a socket that does not share its port the kernel looks for no others.
fn close_group(listeners: &[TcpListener], port: u16) -> io::Result<()> {
    if let Some(last) = listeners.last() {
        SockRef::from(last).set_reuse_port(false)?;
    }
    // The kernel remembers of a port that all who bound it share it, and then asks no more. One who does not share it,
    // at another address, makes it forget.
    let mut result = Ok(());
    for _ in 0..BIND_ATTEMPTS {
        let other = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
        let at = SocketAddr::new(loopback_source(Ipv4Addr::LOCALHOST.into()), port);
        result = other.bind(&at.into());
        if result.is_ok() {
            break;
        }
    }
    result
}

fn listener(at: Option<SocketAddr>) -> io::Result<TcpListener> {
    let unused = |ip: IpAddr| SocketAddr::new(ip, 0);
    let candidates = match at {
        Some(at) => vec![at],
        // A socket of IPv6 serves both families, under any address that the socket lookup steers to it, unless it was
        // bound to an address of IPv6 proper. Where the kernel has no IPv6, IPv4.
        None => vec![
            unused(Ipv4Addr::LOCALHOST.to_ipv6_mapped().into()),
            unused(Ipv4Addr::LOCALHOST.into()),
        ],
    };
    let mut result = Err(io::ErrorKind::AddrNotAvailable.into());
    for at in candidates {
        result = listener_at(at);
        if result.is_ok() {
            break;
        }
    }
    result
}

fn listener_at(at: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(at), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    if at.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    // So that an application can bind its port while connections that came to it through here live on.
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    // Accepted sockets inherit these.
    configure(&socket)?;
    socket.bind(&at.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Sets what every socket of the data plane has: no delay of small writes, and keepalive.
fn configure(socket: &Socket) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE_IDLE)
        .with_interval(KEEPALIVE_INTERVAL)
        .with_retries(KEEPALIVE_COUNT);
    socket.set_tcp_keepalive(&keepalive)
}

/// Connects from within the namespace, and from that address of the pod's, where one is told. Cancelling closes the
/// socket.
pub async fn dial(netns: &Netns, from: Option<IpAddr>, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = socket_in(netns, to)?;
    if let Some(from) = from {
        set_bind_address_no_port(&socket)?;
        socket.bind(&SocketAddr::new(from, 0).into())?;
    }
    connect(socket, to).await
}

/// Leaves the choice of the port to connect, which knows the other end and so has more to choose from.
fn set_bind_address_no_port(socket: &Socket) -> io::Result<()> {
    nix::sys::socket::setsockopt(socket, nix::sys::socket::sockopt::IpBindAddressNoPort, &true).map_err(io::Error::from)
}

/// Connects to an application in the namespace on behalf of `client`, which is whom the application will see.
///
/// The connection comes from a loopback address, a random one each time, so that neither the ports of one address nor
/// connections in TIME_WAIT are a limit. IPv6 has but one loopback address; there the pod's own is used, at a random
/// port. Cancelling closes the socket.
pub async fn dial_as(
    netns: &Netns,
    clients: &Clients,
    local_ports: [u16; 2],
    client: SocketAddr,
    to: SocketAddr,
) -> io::Result<TcpStream> {
    let mut taken = io::Error::from(io::ErrorKind::AddrInUse);
    for _ in 0..BIND_ATTEMPTS {
        let socket = socket_in(netns, to)?;
        // Between two sockets of this kind a port may be shared, as long as the other end differs.
        socket.set_reuse_address(true)?;
        let local = SocketAddr::new(loopback_source(to.ip()), fastrand::u16(local_ports[0]..=local_ports[1]));
        match socket.bind(&local.into()) {
            Ok(()) => {}
            Err(error) if port_taken(&error) => {
                taken = error;
                continue;
            }
            Err(error) => return Err(error),
        }
        let published = Published::new(netns, clients, local, to.port(), client)?;
        match connect(socket, to).await {
            Ok(stream) => {
                published.adopted();
                return Ok(stream);
            }
            Err(error) if port_taken(&error) => taken = error,
            Err(error) => return Err(error),
        }
    }
    Err(taken)
}

fn port_taken(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::AddrInUse | io::ErrorKind::AddrNotAvailable)
}

/// Where connections to an application at `to` come from.
fn loopback_source(to: IpAddr) -> IpAddr {
    match to {
        IpAddr::V4(_) => Ipv4Addr::new(127, fastrand::u8(1..=254), fastrand::u8(..), fastrand::u8(1..=254)).into(),
        IpAddr::V6(_) => to,
    }
}

/// A client told to the kernel programs; taken back unless a connection has come of it.
struct Published<'a> {
    netns: u64,
    clients: &'a Clients,
    local: SocketAddr,
    port: u16,
}

impl<'a> Published<'a> {
    fn new(netns: &Netns, clients: &'a Clients, local: SocketAddr, port: u16, client: SocketAddr) -> io::Result<Self> {
        clients
            .publish(netns.cookie(), local, port, client)
            .map_err(io::Error::other)?;
        Ok(Self {
            netns: netns.cookie(),
            clients,
            local,
            port,
        })
    }

    fn adopted(self) {
        std::mem::forget(self);
    }
}

impl Drop for Published<'_> {
    fn drop(&mut self) {
        self.clients.withdraw(self.netns, self.local, self.port);
    }
}

/// Reads what is there into the buffer's spare room; 0 at the peer's end. Where that does not fill the room there is no
/// more, so the next read waits for news from the kernel instead of asking.
#[expect(unsafe_code, reason = "the room read into is not initialised first")]
pub fn read_available(tcp: &TcpStream, buffer: &mut BytesMut) -> io::Result<usize> {
    let room = buffer.spare_capacity_mut();
    let size = room.len();
    let mut read = None;
    let result = tcp.try_io(Interest::READABLE, || {
        let len = SockRef::from(tcp).recv(room)?;
        read = Some(len);
        // By this error tokio notes that the socket has no more.
        if len > 0 && len < size {
            Err(io::ErrorKind::WouldBlock.into())
        } else {
            Ok(())
        }
    });
    match read {
        Some(len) => {
            // SAFETY: the kernel has written `len` bytes into the spare room.
            unsafe { buffer.set_len(buffer.len() + len) };
            Ok(len)
        }
        None => result.map(|()| 0),
    }
}

fn socket_in(netns: &Netns, to: SocketAddr) -> io::Result<Socket> {
    let socket = netns
        .run(|| Socket::new(Domain::for_address(to), Type::STREAM.nonblocking(), Some(Protocol::TCP)))
        .map_err(io::Error::other)??;
    configure(&socket)?;
    Ok(socket)
}

async fn connect(socket: Socket, to: SocketAddr) -> io::Result<TcpStream> {
    let pending = match socket.connect(&to.into()) {
        // The other end is on this machine and has answered already.
        Ok(()) => false,
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => true,
        Err(error) => return Err(error),
    };
    let stream = TcpStream::from_std(socket.into())?;
    if pending {
        stream.writable().await?;
        if let Some(error) = SockRef::from(&stream).take_error()? {
            return Err(error);
        }
    }
    Ok(stream)
}

/// Brings up the loopback of the calling thread's namespace and gives it `addr`.
#[expect(unsafe_code, reason = "interface requests without a safe wrapper")]
pub(super) fn bring_up_loopback(addr: Ipv4Addr) -> io::Result<()> {
    use std::os::fd::AsRawFd as _;

    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
    // SAFETY: a structure of plain integers, for which zero is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let set_name = |request: &mut libc::ifreq, name: &[u8]| {
        for (to, from) in request.ifr_name.iter_mut().zip(name.iter().chain(&[0])) {
            *to = *from as libc::c_char;
        }
    };
    set_name(&mut request, b"lo");
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: the request lives through the call and has the form that the command reads.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // A second address under a label, so that 127.0.0.1 stays.
    set_name(&mut request, b"lo:0");
    let addr = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: 0,
        sin_addr: libc::in_addr {
            s_addr: u32::from_ne_bytes(addr.octets()),
        },
        sin_zero: [0; 8],
    };
    // SAFETY: the two types have the same size and alignment suffices; the kernel reads it as `sockaddr_in`.
    request.ifr_ifru.ifru_addr = unsafe { std::mem::transmute::<libc::sockaddr_in, libc::sockaddr>(addr) };
    // SAFETY: as above.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFADDR, &raw const request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
