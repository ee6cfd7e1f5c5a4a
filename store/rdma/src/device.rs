//! Discovery of RDMA devices, their ports and addresses.

use crate::error::{Error, Unavailable};
use crate::path::{Gid, LinkLayer, Path};
use crate::verbs::Context;
use ibverbs_sys as ffi;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    pub name: String,
    /// Globally unique identifier; zero if the device has none.
    pub guid: u64,
    /// Ports of the device. Empty if the device could not be opened.
    pub ports: Vec<PortInfo>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortInfo {
    /// Number of the port, from 1.
    pub number: u8,
    pub active: bool,
    pub link: LinkLayer,
    /// Current MTU in bytes, 256 to 4,096.
    pub mtu_bytes: u32,
    /// Maximum length of one transfer request, in bytes.
    pub message_bytes_max: u32,
    /// Local identifier in the subnet (InfiniBand only).
    pub lid: u16,
    pub gids: Vec<GidInfo>,
    pub(crate) mtu: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GidInfo {
    pub index: u8,
    pub gid: Gid,
    pub kind: GidKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GidKind {
    InfiniBand,
    /// RoCE directly in Ethernet frames, within one subnet.
    RoceV1,
    /// RoCE over UDP, which is routed.
    RoceV2,
}

impl PortInfo {
    /// Chooses an address unless one is configured. On Ethernet: RoCE v2, first IPv4, then global
    /// IPv6, then link-local; never RoCE v1. On InfiniBand: the first.
    pub fn default_gid(&self) -> Option<GidInfo> {
        let rank = |gid: &GidInfo| match gid.kind {
            GidKind::RoceV1 => None,
            GidKind::InfiniBand => Some(0),
            GidKind::RoceV2 => Some(u32::from(!gid.gid.is_ipv4()) + u32::from(gid.gid.is_link_local())),
        };
        let ranked = self.gids.iter().filter_map(|gid| Some((rank(gid)?, *gid)));
        ranked.min_by_key(|(rank, gid)| (*rank, gid.index)).map(|(_, gid)| gid)
    }

    /// Returns the description by which a peer chooses this port, or `None` if the port is down.
    pub fn path(&self) -> Option<Path> {
        let gid = self.default_gid()?.gid;
        self.active.then_some(Path { link: self.link, gid })
    }

    pub(crate) fn read(context: &Context, number: u8) -> Result<PortInfo, Error> {
        let port = context.port(number)?;
        let link = match u32::from(port.link_layer) {
            ffi::IBV_LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
            _ => LinkLayer::InfiniBand,
        };
        let active = port.state == ffi::ibv_port_state::IBV_PORT_ACTIVE;
        // The GID table of a port that is down is meaningless. The call returns the tables of all
        // ports at once.
        let entries = if active { context.gids(GIDS_MAX)? } else { Vec::new() };
        let gids = entries.iter().filter(|entry| entry.port_num == u32::from(number)).filter_map(gid_info).collect();
        let mtu = u8::try_from(port.active_mtu).ok().filter(|mtu| (1..=5).contains(mtu)).unwrap_or(1);
        let mtu_bytes = 128 << mtu;
        let message_bytes_max = port.max_msg_sz.max(1);
        Ok(PortInfo { number, active, link, mtu_bytes, message_bytes_max, lid: port.lid, gids, mtu })
    }
}

/// Maximum number of GID entries read per device.
const GIDS_MAX: usize = 1024;

fn gid_info(entry: &ffi::ibv_gid_entry) -> Option<GidInfo> {
    let kind = match entry.gid_type {
        ffi::IBV_GID_TYPE_ROCE_V1 => GidKind::RoceV1,
        ffi::IBV_GID_TYPE_ROCE_V2 => GidKind::RoceV2,
        _ => GidKind::InfiniBand,
    };
    let gid = ibverbs::Gid::from(entry.gid);
    let gid = Gid((u128::from(gid.subnet_prefix()) << 64 | u128::from(gid.interface_id())).to_be_bytes());
    Some(GidInfo { index: u8::try_from(entry.gid_index).ok()?, gid, kind })
}

/// Lists the RDMA devices of this machine. Blocks, for some milliseconds per device.
pub fn devices() -> Result<Vec<DeviceInfo>, Unavailable> {
    if let Some(why) = ffi::missing() {
        return Err(Unavailable::NoLibrary(why.to_string()));
    }
    let found =
        ibverbs::devices().map_err(|error| Unavailable::NoSupport(error.raw_os_error().unwrap_or(libc::EIO)))?;
    let info = |device: ibverbs::Device<'_>| {
        let name = device.name()?.to_string_lossy().into_owned();
        let guid = device.guid().map_or(0, |guid| u64::from_be(guid.into()));
        let ports = ports(&name).unwrap_or_else(|error| {
            // Common in containers: the host's devices are listed but must not be opened.
            tracing::debug!(device = name, %error, "an RDMA device cannot be used");
            Vec::new()
        });
        Some(DeviceInfo { name, guid, ports })
    };
    Ok(found.iter().filter_map(info).collect())
}

fn ports(name: &str) -> Result<Vec<PortInfo>, Error> {
    let context = Context::open(name)?;
    let count = context.attributes()?.phys_port_cnt;
    (1..=count).map(|number| PortInfo::read(&context, number)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn port(gids: &[(GidKind, Gid)]) -> PortInfo {
        let info = |(index, &(kind, gid)): (usize, &(GidKind, Gid))| GidInfo { index: index as u8, gid, kind };
        let gids = gids.iter().enumerate().map(info).collect();
        let link = LinkLayer::Ethernet;
        PortInfo { number: 1, active: true, link, mtu_bytes: 1024, message_bytes_max: 1, lid: 0, gids, mtu: 3 }
    }

    #[test]
    fn default_gid_prefers_roce_v2_over_ipv4() {
        let v4 = Gid(Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped().octets());
        let (mut link_local, mut global) = (Gid([0; 16]), Gid([0; 16]));
        link_local.0[..2].copy_from_slice(&[0xfe, 0x80]);
        global.0[..2].copy_from_slice(&[0x20, 0x01]);
        let all = [
            (GidKind::RoceV1, v4),
            (GidKind::RoceV2, link_local),
            (GidKind::RoceV2, global),
            (GidKind::RoceV1, link_local),
            (GidKind::RoceV2, v4),
        ];
        assert_eq!(port(&all).default_gid().unwrap().index, 4);
        assert_eq!(port(&all[..4]).default_gid().unwrap().index, 2);
        assert_eq!(port(&all[..2]).default_gid().unwrap().index, 1);
        assert_eq!(port(&all[..1]).default_gid(), None);
        assert_eq!(PortInfo { active: false, ..port(&all) }.path(), None);
    }
}
