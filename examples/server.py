"""A LitServer of your own with a trained policy and its rewards: python server.py EXPORT [PORT]"""

import signal
import sys

import litserve

from serve import PolicyAPI, RewardAPI


def main(export: str, port: int) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: else LitServe's other processes go on
    server = litserve.LitServer([PolicyAPI(export), RewardAPI(export)], accelerator="cpu", timeout=False)
    server.run(host="127.0.0.1", port=port, num_api_servers=1, generate_client_file=False)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 8000)
