# What comes from the distribution, where the base lacks it: Python and the OpenMP library. It may need a network; what
# the images add on top of it is built without one.
ARG BASE
FROM ${BASE}
# A certificate bundle is lent to the package manager, and is not part of the layer.
RUN --mount=type=secret,id=extra_ca \
    command -v python3.11 >/dev/null || missing="python3.11 python3-pip"; \
    ldconfig -p | grep -q libgomp.so.1 || missing="$missing libgomp1"; \
    if [ -n "$missing" ]; then \
      [ ! -s /run/secrets/extra_ca ] || ca="-oAcquire::https::CaInfo=/run/secrets/extra_ca"; \
      apt-get $ca update -qq \
      && DEBIAN_FRONTEND=noninteractive apt-get $ca install -y -qq --no-install-recommends $missing >/dev/null || exit 1; \
    fi; \
    mkdir -p /usr/share/trainyard \
    && dpkg-query -W -f '${Package} ${Version}\n' > /usr/share/trainyard/distribution-packages.txt \
    && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/* ~/.cache
