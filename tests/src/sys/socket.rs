//! Packet sockets, and socket options without a safe setter.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd};

use nix::net::if_::if_nametoindex;
use socket2::{Domain, Protocol, Socket, Type};

const PACKET_STATISTICS: libc::c_int = 6;
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;

/// A socket that receives every packet that arrives on `device` of the calling thread's network namespace.
pub(crate) fn packet_socket(device: &str) -> io::Result<Socket> {
    let every = (libc::ETH_P_ALL as u16).to_be();
    // Protocol 0 at first: nothing is received before the socket is bound to its device.
    let socket = Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(0)))?;
    set_option(&socket, libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)?;
    set_option(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, 64 << 20)?;
    let index = if_nametoindex(device)?;
    // SAFETY: all-zero bytes are a valid sockaddr_ll.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = every;
    address.sll_ifindex = i32::try_from(index).map_err(io::Error::other)?;
    let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: `address` is a sockaddr_ll of the given length and outlives the call.
    let done = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(socket)
}

/// How many packets the kernel could not queue on a packet socket since the last call.
pub(crate) fn kernel_drops(socket: &Socket) -> io::Result<u32> {
    let mut statistics = [0u32; 2];
    let mut length = size_of_val(&statistics) as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, two 32-bit counters, to the array.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            PACKET_STATISTICS,
            statistics.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(statistics[1])
}

/// Lets `connect` send the SYN only with the first data (`TCP_FASTOPEN_CONNECT`).
pub(crate) fn fastopen_connect(socket: &impl AsFd) -> io::Result<()> {
    set_option(socket, libc::IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT, 1)
}

/// Leaves the choice of the source port to `connect`, so that one port serves several destinations.
pub(crate) fn bind_address_no_port(socket: &impl AsFd) -> io::Result<()> {
    set_option(socket, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1)
}

/// Lets a listener take data that comes with the SYN (`TCP_FASTOPEN`).
pub fn fastopen_listen(socket: &impl AsFd) -> io::Result<()> {
    set_option(socket, libc::IPPROTO_TCP, libc::TCP_FASTOPEN, 16)
}

/// Switches `TCP_REPAIR`, in which `connect` sends nothing and the connection just stands.
pub fn repair(socket: &impl AsFd, on: bool) -> io::Result<()> {
    set_option(socket, libc::IPPROTO_TCP, libc::TCP_REPAIR, on.into())
}

/// Sends the socket's packets by way of `hop` (`IP_OPTIONS` with a loose source route).
pub fn source_route(socket: &impl AsFd, hop: Ipv4Addr) -> io::Result<()> {
    const NO_OPERATION: u8 = 1;
    const LOOSE_SOURCE_ROUTE: u8 = 131;
    let mut options = [NO_OPERATION, LOOSE_SOURCE_ROUTE, 7, 4, 0, 0, 0, 0];
    options[4..].copy_from_slice(&hop.octets());
    set_bytes(socket, libc::IPPROTO_IP, libc::IP_OPTIONS, &options)
}

/// Undoes the socket's connect, by a connect to an address of no family.
pub fn disconnect(socket: &impl AsFd) -> io::Result<()> {
    // SAFETY: all-zero bytes are a valid sockaddr, of the family AF_UNSPEC.
    let nobody: libc::sockaddr = unsafe { std::mem::zeroed() };
    let length = size_of::<libc::sockaddr>() as libc::socklen_t;
    // SAFETY: the address has the given length and outlives the call.
    let done = unsafe { libc::connect(socket.as_fd().as_raw_fd(), &raw const nobody, length) };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Sends an IPv4 packet on `device` to that hardware address, by a packet socket.
pub(crate) fn send_frame(packet: &[u8], device: &str, to: [u8; 6]) -> io::Result<()> {
    let socket = Socket::new(Domain::PACKET, Type::DGRAM, Some(Protocol::from(0)))?;
    // SAFETY: all-zero bytes are a valid sockaddr_ll.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = (libc::ETH_P_IP as u16).to_be();
    address.sll_ifindex = i32::try_from(if_nametoindex(device)?).map_err(io::Error::other)?;
    address.sll_halen = 6;
    address.sll_addr[..6].copy_from_slice(&to);
    // SAFETY: packet and address have the given lengths and outlive the call.
    let sent = unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            packet.as_ptr().cast(),
            packet.len(),
            0,
            (&raw const address).cast(),
            size_of::<libc::sockaddr_ll>() as libc::socklen_t,
        )
    };
    if sent < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn set_option(socket: &impl AsFd, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    set_bytes(socket, level, name, &value.to_ne_bytes())
}

fn set_bytes(socket: &impl AsFd, level: libc::c_int, name: libc::c_int, value: &[u8]) -> io::Result<()> {
    let length = value.len() as libc::socklen_t;
    // SAFETY: the option's value has the given length and outlives the call.
    let done = unsafe { libc::setsockopt(socket.as_fd().as_raw_fd(), level, name, value.as_ptr().cast(), length) };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
