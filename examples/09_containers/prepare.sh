#!/bin/sh
# Makes a federation and its three members, in one volume each. Sites make their own keys, which stay in their volumes.
set -e
cd "$(dirname "$0")"

on() {
    docker compose run --rm -T --no-deps "$@"
}

on server fewbytes federation init --address server:9092
for site in north south west; do
    invitation=$(on server fewbytes federation invite "$site")
    request=$(on "$site" fewbytes node init "$site" --invitation "$invitation" --folder .)
    on server fewbytes federation join "$request"
done
